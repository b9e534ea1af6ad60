"""Heavy-tailed gradients (Lowy, Razaviyayn 2023): schedules and bounds."""
