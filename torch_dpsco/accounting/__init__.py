"""The privacy ledger, its numerical analysis, budgets and calibration."""
