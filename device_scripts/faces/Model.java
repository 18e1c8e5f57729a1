// The C API of edgesdk_model.h for Java and Kotlin, on Android and elsewhere: one network, EDGESDK_NAME.
//
//     try (EDGESDK_NAME.Model model = new EDGESDK_NAME.Model()) {
//       model.input(0).asFloatBuffer().put(pixels);
//       model.run();
//       model.output(0).asFloatBuffer().get(scores);
//     }
//
// It needs model_jni.c beside it, built into libEDGESDK_NAME_jni.so. Java 8 and newer.

package EDGESDK_NAME;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;

/** An open network. It serves one thread at a time; open one for each thread. */
public final class Model implements AutoCloseable {
  static {
    System.loadLibrary("EDGESDK_NAME_jni");
  }

  /** The library refused a call; {@code status} is its edgesdk_status. */
  public static final class ModelException extends RuntimeException {
    private static final long serialVersionUID = 1L;
    public final int status;

    ModelException(int status, String message) {
      super(message);
      this.status = status;
    }
  }

  /** An input or output: its name in the original model, shape and edgesdk_dtype. */
  public static final class Tensor {
    public final String name;
    public final long[] shape;
    public final int dtype;
    public final long sizeBytes;

    Tensor(String name, long[] shape, int dtype, long sizeBytes) {
      this.name = name;
      this.shape = shape;
      this.dtype = dtype;
      this.sizeBytes = sizeBytes;
    }
  }

  private final Tensor[] inputs;
  private final Tensor[] outputs;
  private long handle;

  /** Opens the network with as many threads as there are CPUs. */
  public Model() {
    this(0, null);
  }

  /**
   * Opens the network with at most numThreads threads (0: all CPUs).
   *
   * @param cacheFolder where code for the GPU is kept once it is built, on Android
   *     Context.getCodeCacheDir().getPath(); null for the user's cache folder
   * @throws ModelException it cannot be opened; the message says why
   */
  public Model(int numThreads, String cacheFolder) {
    handle = open(numThreads, cacheFolder);
    try {
      inputs = new Tensor[count(handle, false)];
      outputs = new Tensor[count(handle, true)];
      for (int i = 0; i < inputs.length; ++i) {
        inputs[i] = info(handle, false, i);
      }
      for (int i = 0; i < outputs.length; ++i) {
        outputs[i] = info(handle, true, i);
      }
    } catch (RuntimeException error) {
      close();
      throw error;
    }
  }

  public Tensor[] inputs() {
    return inputs.clone();
  }

  public Tensor[] outputs() {
    return outputs.clone();
  }

  /**
   * Returns the memory of an input, in row-major order and the machine's byte order. What is
   * written there stays for all next runs. It must not be used after {@link #close}.
   */
  public ByteBuffer input(int index) {
    return memory(opened(), false, index).order(ByteOrder.nativeOrder());
  }

  /**
   * Runs the network once.
   *
   * @throws ModelException an input was never asked for, or a step failed
   */
  public void run() {
    run(opened());
  }

  /** Returns the memory of an output, which the next run overwrites; as {@link #input}. */
  public ByteBuffer output(int index) {
    return memory(opened(), true, index).asReadOnlyBuffer().order(ByteOrder.nativeOrder());
  }

  /** Ends it. A second call does nothing. */
  @Override
  public void close() {
    long ended = handle;
    handle = 0;
    if (ended != 0) {
      close(ended);
    }
  }

  private long opened() {
    if (handle == 0) {
      throw new IllegalStateException("the model is closed");
    }
    return handle;
  }

  private static native long open(int numThreads, String cacheFolder);

  private static native void close(long handle);

  private static native int count(long handle, boolean output);

  private static native Tensor info(long handle, boolean output, int index);

  private static native ByteBuffer memory(long handle, boolean output, int index);

  private static native void run(long handle);
}
