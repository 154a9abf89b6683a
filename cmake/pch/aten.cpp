// Gives the precompiled header a file to belong to.
