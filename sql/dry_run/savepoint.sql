SAVEPOINT attempt
