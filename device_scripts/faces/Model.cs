// The C API of edgesdk_model.h for .NET and Mono: one network, EDGESDK_NAME.
//
//     using (var model = new EDGESDK_NAME.Model()) {
//       model.SetInput(0, pixels);
//       model.Run();
//       float[] scores = model.GetOutput<float>(0);
//     }
//
// The library is found as the runtime finds native libraries: beside the program, or in the folders
// of LD_LIBRARY_PATH (Linux) or PATH (Windows). C# 5 and newer; nothing but the base class library.

using System;
using System.Runtime.InteropServices;
using System.Text;

namespace EDGESDK_NAME {

/// <summary>The library refused a call; Status is its edgesdk_status.</summary>
public sealed class ModelException : Exception {
  public ModelException(int status, string message) : base(message) { Status = status; }
  public int Status { get; private set; }
}

/// <summary>An input or output: its name in the original model, shape and edgesdk_dtype.</summary>
public sealed class Tensor {
  internal Tensor(string name, long[] shape, int dtype, long sizeBytes) {
    Name = name;
    Shape = shape;
    DType = dtype;
    SizeBytes = sizeBytes;
  }
  public string Name { get; private set; }
  public long[] Shape { get; private set; }
  public int DType { get; private set; }
  public long SizeBytes { get; private set; }
}

/// <summary>An open network. It serves one thread at a time; open one for each thread.</summary>
public sealed class Model : IDisposable {
  const string Library = "EDGESDK_LIBRARY";
  const uint AbiVersion = EDGESDK_ABI;

  IntPtr handle;

  /// <summary>Opens the network with at most numThreads threads (0: all CPUs).</summary>
  /// <exception cref="ModelException">It cannot be opened; the message says why.</exception>
  public Model(int numThreads = 0) {
    IntPtr reason = Marshal.AllocHGlobal(1024);
    try {
      Marshal.WriteByte(reason, 0);
      var options = new Options {
        StructSize = (UIntPtr)Marshal.SizeOf(typeof(Options)),
        NumThreads = numThreads,
        ErrorBuffer = reason,
        ErrorBufferSize = (UIntPtr)1024,
      };
      int status = edgesdk_open_EDGESDK_NAME(AbiVersion, ref options, out handle);
      if (status != 0) throw new ModelException(status, Utf8(reason));
    } finally {
      Marshal.FreeHGlobal(reason);
    }
    Describe();
  }

  ~Model() { Dispose(); }

  public Tensor[] Inputs { get; private set; }
  public Tensor[] Outputs { get; private set; }
  public int NumThreads { get { return edgesdk_model_num_threads(handle); } }

  /// <summary>How many fixed shapes the network was compiled for.</summary>
  public int NumVariants { get { return edgesdk_model_num_variants(handle); } }

  /// <summary>Has inputs, outputs and runs be those of a variant, numbered from 0. Each keeps the
  /// inputs that were set.</summary>
  /// <exception cref="ModelException">There is no such variant.</exception>
  public void SelectVariant(int variant) {
    Check(edgesdk_model_select_variant(handle, variant));
    Describe();
  }

  /// <summary>Copies the elements of an input, in row-major order; they stay for all next runs.
  /// </summary>
  /// <exception cref="ArgumentException">data has another size than the input.</exception>
  public void SetInput<T>(int index, T[] data) where T : struct {
    CheckSize(data, Inputs[index]);
    IntPtr memory;
    UIntPtr sizeBytes;
    Check(edgesdk_model_own_input(handle, index, out memory, out sizeBytes));
    Copy(data, memory, true);
  }

  /// <summary>Runs the network once.</summary>
  /// <exception cref="ModelException">An input is missing, or a step failed.</exception>
  public void Run() { Check(edgesdk_model_run(handle)); }

  /// <summary>Returns a copy of an output of the last run, in row-major order.</summary>
  public T[] GetOutput<T>(int index) where T : struct {
    IntPtr memory;
    UIntPtr sizeBytes;
    Check(edgesdk_model_get_output(handle, index, out memory, out sizeBytes));
    var data = new T[Outputs[index].SizeBytes / Marshal.SizeOf(typeof(T))];
    CheckSize(data, Outputs[index]);
    Copy(data, memory, false);
    return data;
  }

  public void Dispose() {
    edgesdk_model_close(handle);
    handle = IntPtr.Zero;
    GC.SuppressFinalize(this);
  }

  void Describe() {
    Inputs = new Tensor[edgesdk_model_num_inputs(handle)];
    Outputs = new Tensor[edgesdk_model_num_outputs(handle)];
    TensorInfo info;
    for (int i = 0; i < Inputs.Length; ++i) {
      Check(edgesdk_model_input_info(handle, i, out info));
      Inputs[i] = Described(info);
    }
    for (int i = 0; i < Outputs.Length; ++i) {
      Check(edgesdk_model_output_info(handle, i, out info));
      Outputs[i] = Described(info);
    }
  }

  static long SizeBytes<T>(T[] data) { return (long)data.Length * Marshal.SizeOf(typeof(T)); }

  static void CheckSize<T>(T[] data, Tensor tensor) {
    if (SizeBytes(data) != tensor.SizeBytes) {
      throw new ArgumentException(
          tensor.Name + " has " + tensor.SizeBytes + " bytes, the array " + SizeBytes(data));
    }
  }

  static void Copy<T>(T[] data, IntPtr memory, bool toMemory) where T : struct {
    long sizeBytes = SizeBytes(data);
    GCHandle pinned = GCHandle.Alloc(data, GCHandleType.Pinned);
    try {
      IntPtr array = pinned.AddrOfPinnedObject();
      var bytes = new byte[Math.Min(sizeBytes, 1 << 16)];
      for (long done = 0; done < sizeBytes; done += bytes.Length) {
        int count = (int)Math.Min(bytes.Length, sizeBytes - done);
        Marshal.Copy(Offset(toMemory ? array : memory, done), bytes, 0, count);
        Marshal.Copy(bytes, 0, Offset(toMemory ? memory : array, done), count);
      }
    } finally {
      pinned.Free();
    }
  }

  static IntPtr Offset(IntPtr address, long bytes) { return new IntPtr(address.ToInt64() + bytes); }

  static Tensor Described(TensorInfo info) {
    var shape = new long[info.NDim];
    if (shape.Length > 0) Marshal.Copy(info.Shape, shape, 0, shape.Length);
    return new Tensor(Utf8(info.Name), shape, info.DType, (long)info.SizeBytes.ToUInt64());
  }

  static string Utf8(IntPtr text) {
    int length = 0;
    while (Marshal.ReadByte(text, length) != 0) ++length;
    var bytes = new byte[length];
    Marshal.Copy(text, bytes, 0, length);
    return Encoding.UTF8.GetString(bytes);
  }

  void Check(int status) {
    if (status != 0) throw new ModelException(status, Utf8(edgesdk_model_last_error(handle)));
  }

  [StructLayout(LayoutKind.Sequential)]
  struct Options {
    public UIntPtr StructSize;
    public int NumThreads;
    public IntPtr ErrorBuffer;
    public UIntPtr ErrorBufferSize;
  }

  [StructLayout(LayoutKind.Sequential)]
  struct TensorInfo {
    public IntPtr Name;
    public int DType;
    public int NDim;
    public IntPtr Shape;
    public UIntPtr SizeBytes;
  }

  const CallingConvention C = CallingConvention.Cdecl;
  [DllImport(Library, CallingConvention = C)]
  static extern int edgesdk_open_EDGESDK_NAME(uint abi, ref Options options, out IntPtr model);
  [DllImport(Library, CallingConvention = C)]
  static extern void edgesdk_model_close(IntPtr model);
  [DllImport(Library, CallingConvention = C)]
  static extern IntPtr edgesdk_model_last_error(IntPtr model);
  [DllImport(Library, CallingConvention = C)]
  static extern int edgesdk_model_num_inputs(IntPtr model);
  [DllImport(Library, CallingConvention = C)]
  static extern int edgesdk_model_num_outputs(IntPtr model);
  [DllImport(Library, CallingConvention = C)]
  static extern int edgesdk_model_input_info(IntPtr model, int index, out TensorInfo info);
  [DllImport(Library, CallingConvention = C)]
  static extern int edgesdk_model_output_info(IntPtr model, int index, out TensorInfo info);
  [DllImport(Library, CallingConvention = C)]
  static extern int edgesdk_model_own_input(IntPtr model, int index, out IntPtr data,
                                            out UIntPtr size);
  [DllImport(Library, CallingConvention = C)]
  static extern int edgesdk_model_run(IntPtr model);
  [DllImport(Library, CallingConvention = C)]
  static extern int edgesdk_model_get_output(IntPtr model, int index, out IntPtr data,
                                             out UIntPtr size);
  [DllImport(Library, CallingConvention = C)]
  static extern int edgesdk_model_num_variants(IntPtr model);
  [DllImport(Library, CallingConvention = C)]
  static extern int edgesdk_model_select_variant(IntPtr model, int variant);
  [DllImport(Library, CallingConvention = C)]
  static extern int edgesdk_model_num_threads(IntPtr model);
}

}  // namespace EDGESDK_NAME
