"""Private mechanisms that are not noisy means: each samples its own law and says what it costs."""
