"""All recipes of Transformer Engine with all their options, in pairs: is what is reported what its kernels were given?"""
