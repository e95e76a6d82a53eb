"""`hfscale tune`: runs the best layouts of a plan for a few steps each, and corrects later plans."""
