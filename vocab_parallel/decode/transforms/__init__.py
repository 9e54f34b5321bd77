"""What a policy is made of: transforms of a step's scores, one kind a module."""
