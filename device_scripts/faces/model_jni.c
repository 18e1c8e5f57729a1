/* What Model.java calls: the C API of edgesdk_model.h behind Java's native interface. Link it with
 * the network's library into libEDGESDK_NAME_jni.so (docs/android.md of edgesdk has the CMake
 * lines). */
#include <jni.h>
#include <stdio.h>
#include <string.h>

#include "EDGESDK_HEADER.h"

#define CLASS "EDGESDK_NAME/Model"

static edgesdk_model* Model(jlong handle) { return (edgesdk_model*)(intptr_t)handle; }

/* Names are UTF-8, which differs from what NewStringUTF takes beyond the usual characters. */
static jstring Text(JNIEnv* env, const char* text) {
  jsize size = (jsize)strlen(text);
  jbyteArray bytes = (*env)->NewByteArray(env, size);
  if (bytes == NULL) return NULL;
  (*env)->SetByteArrayRegion(env, bytes, 0, size, (const jbyte*)text);
  jclass string = (*env)->FindClass(env, "java/lang/String");
  jmethodID make = (*env)->GetMethodID(env, string, "<init>", "([BLjava/lang/String;)V");
  jstring charset = (*env)->NewStringUTF(env, "UTF-8");
  if (charset == NULL) return NULL;
  return (jstring)(*env)->NewObject(env, string, make, bytes, charset);
}

static void Throw(JNIEnv* env, edgesdk_status status, const char* message) {
  jstring text = Text(env, message);
  if (text == NULL) return; /* out of memory, which is thrown already */
  jclass kind = (*env)->FindClass(env, CLASS "$ModelException");
  if (kind == NULL) return;
  jmethodID make = (*env)->GetMethodID(env, kind, "<init>", "(ILjava/lang/String;)V");
  if (make == NULL) return;
  jthrowable error = (jthrowable)(*env)->NewObject(env, kind, make, (jint)status, text);
  if (error != NULL) (*env)->Throw(env, error);
}

static jlong Open(JNIEnv* env, jclass self, jint num_threads, jstring cache_folder) {
  (void)self;
  char reason[1024] = "";
  edgesdk_options options;
  memset(&options, 0, sizeof(options));
  options.struct_size = sizeof(options);
  options.num_threads = num_threads;
  options.error_buffer = reason;
  options.error_buffer_size = sizeof(reason);
  if (cache_folder != NULL) {
    options.cache_folder = (*env)->GetStringUTFChars(env, cache_folder, NULL);
    if (options.cache_folder == NULL) return 0;
  }
  edgesdk_model* model = NULL;
  edgesdk_status status = edgesdk_open_EDGESDK_MODEL(EDGESDK_ABI_VERSION, &options, &model);
  if (cache_folder != NULL) {
    (*env)->ReleaseStringUTFChars(env, cache_folder, options.cache_folder);
  }
  if (status != EDGESDK_OK) Throw(env, status, reason);
  return (jlong)(intptr_t)model;
}

static void Close(JNIEnv* env, jclass self, jlong handle) {
  (void)env;
  (void)self;
  edgesdk_model_close(Model(handle));
}

static jint Count(JNIEnv* env, jclass self, jlong handle, jboolean output) {
  (void)env;
  (void)self;
  return output ? edgesdk_model_num_outputs(Model(handle))
                : edgesdk_model_num_inputs(Model(handle));
}

static jobject Info(JNIEnv* env, jclass self, jlong handle, jboolean output, jint index) {
  (void)self;
  edgesdk_model* model = Model(handle);
  edgesdk_tensor_info info;
  edgesdk_status status = output ? edgesdk_model_output_info(model, index, &info)
                                 : edgesdk_model_input_info(model, index, &info);
  if (status != EDGESDK_OK) {
    Throw(env, status, edgesdk_model_last_error(model));
    return NULL;
  }
  jstring name = Text(env, info.name);
  jlongArray shape = (*env)->NewLongArray(env, info.ndim);
  if (name == NULL || shape == NULL) return NULL;
  for (int32_t i = 0; i < info.ndim; ++i) {
    jlong size = info.shape[i];
    (*env)->SetLongArrayRegion(env, shape, i, 1, &size);
  }
  jclass kind = (*env)->FindClass(env, CLASS "$Tensor");
  if (kind == NULL) return NULL;
  jmethodID make = (*env)->GetMethodID(env, kind, "<init>", "(Ljava/lang/String;[JIJ)V");
  if (make == NULL) return NULL;
  return (*env)->NewObject(env, kind, make, name, shape, (jint)info.dtype, (jlong)info.size_bytes);
}

static jobject Memory(JNIEnv* env, jclass self, jlong handle, jboolean output, jint index) {
  (void)self;
  edgesdk_model* model = Model(handle);
  const void* data = NULL;
  void* own = NULL;
  size_t size_bytes = 0;
  edgesdk_status status = output ? edgesdk_model_get_output(model, index, &data, &size_bytes)
                                 : edgesdk_model_own_input(model, index, &own, &size_bytes);
  if (status != EDGESDK_OK) {
    Throw(env, status, edgesdk_model_last_error(model));
    return NULL;
  }
  return (*env)->NewDirectByteBuffer(env, output ? (void*)(uintptr_t)data : own, (jlong)size_bytes);
}

static void Run(JNIEnv* env, jclass self, jlong handle) {
  (void)self;
  edgesdk_status status = edgesdk_model_run(Model(handle));
  if (status != EDGESDK_OK) Throw(env, status, edgesdk_model_last_error(Model(handle)));
}

JNIEXPORT jint JNICALL JNI_OnLoad(JavaVM* vm, void* reserved) {
  (void)reserved;
  static const JNINativeMethod kMethods[] = {
      {"open", "(ILjava/lang/String;)J", (void*)Open},
      {"close", "(J)V", (void*)Close},
      {"count", "(JZ)I", (void*)Count},
      {"info", "(JZI)L" CLASS "$Tensor;", (void*)Info},
      {"memory", "(JZI)Ljava/nio/ByteBuffer;", (void*)Memory},
      {"run", "(J)V", (void*)Run},
  };
  JNIEnv* env = NULL;
  if ((*vm)->GetEnv(vm, (void**)&env, JNI_VERSION_1_6) != JNI_OK) return JNI_ERR;
  jclass model = (*env)->FindClass(env, CLASS);
  if (model == NULL) return JNI_ERR;
  jint count = (jint)(sizeof(kMethods) / sizeof(kMethods[0]));
  if ((*env)->RegisterNatives(env, model, kMethods, count) != 0) return JNI_ERR;
  return JNI_VERSION_1_6;
}
