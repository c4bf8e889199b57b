"""Pipeline schedules as data that can be simulated without processes."""
