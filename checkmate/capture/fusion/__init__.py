"""Groups of ops whose kernel Inductor compiles: each is one op of the plan."""
