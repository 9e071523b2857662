/* All that is refused by name. */
#include "gpumem.h"

/* What PyTorch links, or cuDNN looks up. */
#define UNSUPPORTED(name, status) GM_API int name(void) { return gm_unsupported(#name, status); }
#include "unsupported.h"
