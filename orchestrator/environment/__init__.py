"""What jobs import: the packages of their interpreter, the code snapshot, and wheels that no index offers."""
