"""A conversation in the terminal, with a group of one's own or a running one."""
