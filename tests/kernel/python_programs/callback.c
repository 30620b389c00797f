/* Calls back so many times: a library that unload.py loads and unloads without end. */
long call(long (*function)(long), long times)
{
	long total = 0;
	for (long i = 0; i < times; i++)
		total += function(i);
	return total;
}
