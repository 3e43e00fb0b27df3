"""Where the milliseconds of an event go, from the generator's clock to the reader."""
