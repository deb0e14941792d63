"""Models, one file each. A file's stem is the name that users write; files without a ``DECLARATION`` are shared parts."""
