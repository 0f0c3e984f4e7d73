"""`hpctrain doctor --stress`: tests of the results and the speed of products, memory, messages and disks."""
