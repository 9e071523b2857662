/* Libraries whose vendors do not document their sizes: each one's identifier in the C sources (gm_note_sizes), its name,
 * the note in the report of a step that used it, and the range assumed for its sizes (sizes.c), "" if none is reported. */
ESTIMATED(GM_RNN, "cuDNN's RNN",
          "the reserve space and workspace of cuDNN's RNN are estimates",
          "cuDNN's RNN, with a reserve space of half to twice the estimate and a workspace of none to twice")
ESTIMATED(GM_CTC, "cuDNN's CTC loss",
          "the workspace of cuDNN's CTC loss is an estimate",
          "the workspace of cuDNN's CTC loss, from none to four times the estimate")
ESTIMATED(GM_CUFFT, "cuFFT",
          "the workspaces of cuFFT are estimates, and memory that its plans keep outside of PyTorch's allocator is not "
          "counted",
          "cuFFT's workspaces, from none to the most that its manual names")
ESTIMATED(GM_CUSOLVER, "cuSOLVER",
          "the workspaces of cuSOLVER are estimates",
          "cuSOLVER's workspaces, from none to four times the estimate")
ESTIMATED(GM_CUSPARSE, "cuSPARSE",
          "predictions do not include the workspaces of cuSPARSE, but their ranges do",
          "cuSPARSE's workspaces, from none to copies of the matrices, or, for two sparse matrices, to every product "
          "twice")
ESTIMATED(GM_POOL, "cudaMallocAsync",
          "the memory that cudaMallocAsync reserves is an estimate",
          "")
ESTIMATED(GM_CUDNN_PLAN, "cuDNN's other plans",
          "predictions do not include the workspaces of cuDNN's attention",
          "")
ESTIMATED(GM_BATCH_NORM, "cuDNN's batch normalization",
          "predictions do not include the workspaces of cuDNN's batch normalization with channels last, but their "
          "ranges do",
          "cuDNN's batch normalization with channels last, from none to partial sums for every 32 pixels and one bit "
          "of each value")
