/* Functions that PyTorch links, or cuDNN looks up, and that are refused by name. What a torch to
 * come, or another library, may link is in refused_exports.txt: setup.py makes a source of it. */
#include "base/base.h"

#define UNSUPPORTED(name, status) GM_API int name(void) { return gm_unsupported(#name, status); }
#include "libraries/refused_functions.h"
