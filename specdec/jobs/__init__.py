"""Files of prompts to files of answers: by one process, under torchrun, or through Ray."""
