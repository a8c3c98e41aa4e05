/* SPDX-License-Identifier: Apache-2.0 */
/* The sentence that dpuflow_doca_error() gives: the first fault's, as later ones follow from it. */
#include <stdarg.h>
#include <stdio.h>

#include "adapter.h"

static _Thread_local char sentence[512];

void say_nothing(void)
{
	sentence[0] = '\0';
}

bool said(void)
{
	return sentence[0] != '\0';
}

int say(int status, const char *format, ...)
{
	va_list arguments;

	if (said())
		return status;
	va_start(arguments, format);
	vsnprintf(sentence, sizeof(sentence), format, arguments);
	va_end(arguments);
	return status;
}

int failed(doca_error_t error, const char *format, ...)
{
	char what[320];
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(what, sizeof(what), format, arguments);
	va_end(arguments);
	return say(DPUFLOW_DOCA_FAILED, "%s (%s: %s)", what, doca_error_get_name(error), doca_error_get_descr(error));
}

const char *dpuflow_doca_error(void)
{
	return sentence;
}
