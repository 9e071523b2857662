"""Files of a repository: replaced as a whole, git's, and their JSON."""
