/* ranks.c: the bytes that ranks in different processes contribute to a collective */
#ifndef GPUMEM_RANKS_H
#define GPUMEM_RANKS_H

#include <stdbool.h>
#include <stdint.h>

enum { GM_WORLD_NAME = 128, GM_EXCHANGED = 512 << 10 /* maximum bytes per rank */ };

typedef struct gm_world gm_world;

void gm_world_name(char name[GM_WORLD_NAME]); /* all zeros: no other rank will join */
gm_world *gm_world_join(const char name[GM_WORLD_NAME], int ranks, int rank); /* NULL: a world of zeros */
void gm_world_leave(gm_world *w);
/* Contributes this rank's bytes (NULL: unknown), and waits for those of all others. */
void gm_world_exchange(gm_world *w, const void *bytes, uint64_t size);
const unsigned char *gm_world_bytes(const gm_world *w, int rank); /* the last ones that a rank contributed; NULL: unknown */

#endif
