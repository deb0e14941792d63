"""The login side: config, matrix, planner, rendering, executors, tracker, command line. Imports no framework."""
