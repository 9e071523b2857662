/* All that is refused by name. */
#include "base/base.h"

/* What PyTorch links, or cuDNN looks up. */
#define UNSUPPORTED(name, status) GM_API int name(void) { return gm_unsupported(#name, status); }
#include "libraries/refused_functions.h"

/* What a torch to come, or another library, may link. */
#include "libraries/refused_exports.h"
