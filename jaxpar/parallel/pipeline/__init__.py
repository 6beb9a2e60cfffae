"""Pipeline parallelism: schedules as data, validated, simulated, drawn and run."""
