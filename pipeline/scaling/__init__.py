"""How a variant's speed grows with the number of devices: measured, projected to more devices, and priced."""
