"""Forward, backward and update as one graph of Inductor: gradients die at their update."""
