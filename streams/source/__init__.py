"""What users declare and run: the event source with its handlers, inputs, jobs and producers."""
