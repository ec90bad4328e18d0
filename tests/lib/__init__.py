"""What tests share: models, drafters, equations, recorders and guards."""
