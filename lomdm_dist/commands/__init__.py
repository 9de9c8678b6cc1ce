"""The commands of `lomdm`, a file each: their options, and what they say and write."""
