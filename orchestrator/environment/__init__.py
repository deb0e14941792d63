"""What a job imports: the packages of its interpreter, its frozen code, wheels that no index offers."""
