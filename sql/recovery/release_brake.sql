DELETE FROM brake WHERE kind = 'recovery' AND scope = $1 RETURNING scope
