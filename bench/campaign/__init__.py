"""All measurements of a GPU machine in calls of some minutes: stages, calls that resume, archives, the summary."""
