/* collectives.c: what collectives compute from the bytes that ranks contribute */
#ifndef GPUMEM_COLLECTIVES_H
#define GPUMEM_COLLECTIVES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ncclDataType_t, ncclRedOp_t; types of lower precision are not computed */
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 };
enum { SUM, PROD, MAX, MIN, AVG };

uint64_t gm_element_size(int type);
/* Reduces the elements of all ranks from a byte offset on; false if a rank's are unknown (NULL), or of low precision. */
bool gm_reduce(const unsigned char *const *given, int ranks, unsigned char *to, uint64_t at, size_t count, int type,
               int operation);

typedef enum { GM_BROADCAST, GM_REDUCE, GM_ALL_REDUCE, GM_ALL_GATHER, GM_REDUCE_SCATTER } gm_collective_kind;

typedef struct {
    gm_collective_kind kind;
    size_t count; /* of elements, as in NCCL's function */
    int type, operation, root;
} gm_collective;

/* Ranks that are devices of this process. */
typedef struct gm_company gm_company;

gm_company *gm_company_new(int ranks); /* NULL: no memory */
void gm_company_leave(gm_company *company);
/* A rank reaches its next collective; the last rank to do so performs it. */
bool gm_company_meet(gm_company *company, int rank, gm_collective collective, const void *from, void *to);

#endif
