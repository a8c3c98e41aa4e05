"""How right dpuflow is: on scripted jobs drawn at random, and on real captures beside them."""
