"""Models, one file each; the file name is the name that users write."""
