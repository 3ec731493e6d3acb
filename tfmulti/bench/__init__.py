"""How a model's training scales: the measured matrix, where the time goes, and a prediction."""
