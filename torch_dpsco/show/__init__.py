"""What is shown of public numbers: pictures, previews, loggers and the command line. Nothing inside imports it."""
