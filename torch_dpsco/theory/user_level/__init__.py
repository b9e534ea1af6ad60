"""User-level privacy by filtered averaging (Asi, Liu): sensitivity, calibration, schedules."""
