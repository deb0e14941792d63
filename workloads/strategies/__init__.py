"""Ways of parallel training, one file each. A file's stem is the name that users write; see ``protocol``."""
