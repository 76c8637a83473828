"""What people read in a browser: the page of a run, of a plan, and the data that the live page draws."""
