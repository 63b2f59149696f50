"""Reading files from strangers; writing files completely or not at all."""
