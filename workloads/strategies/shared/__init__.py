"""What several strategies share; the files beside this folder are one strategy each."""
