"""What the papers claim of acceptance, as data, and what measures it: arms, acceptance rates, trainings, the page."""
