"""Models, one file each. A file's stem is the name that users write; one without ``DECLARATION`` is a shared part."""
