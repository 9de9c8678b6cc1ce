"""Starting jobs on many hosts: the hostfile, what is checked before, and who starts again after."""
