// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// SocketPath returns where the socket of the active reconciler is, or would be.
func (d *Dir) SocketPath() string { return d.path + "/" + socketFile }

// Listen listens on the socket of the active reconciler, which only the user of this process can connect to.
// The caller holds the InstanceLock: a socket that exists was left by a process that ended, and is replaced.
func (d *Dir) Listen() (net.Listener, error) {
	const op = "listen on"
	root, err := d.dataDir()
	if err != nil {
		return nil, err
	}
	defer root.close()
	if err := root.removeSocket(op); err != nil {
		return nil, err
	}
	listening := net.ListenConfig{Control: setSocketMode}
	l, err := listening.Listen(context.Background(), "unix", root.socketAddress())
	if err != nil {
		return nil, socketError(op, root, err)
	}
	// The descriptor in its address may be another directory then, and the socket that of another process.
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	return l, nil
}

// removeSocket removes the socket of a process that has ended.
func (f *folder) removeSocket(op string) error {
	_, err := f.recognize(socketFile)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if errors.Is(err, errUnknown) {
		return fmt.Errorf("%s %s: %w: it is not a socket; move it away",
			op, shown(f.in(socketFile)), ErrRefused)
	}
	if err != nil {
		return err
	}
	return f.remove(socketFile)
}

// setSocketMode gives a socket the mode that its file gets from bind(2).
func setSocketMode(_, _ string, c syscall.RawConn) (err error) {
	controlErr := c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), fileMode) })
	return errors.Join(err, controlErr)
}

// Dial connects to the socket of the active reconciler. The error is an os.ErrNotExist if there is none, and
// a unix.ECONNREFUSED if the process that made it has ended.
func (d *Dir) Dial(ctx context.Context) (net.Conn, error) {
	root, err := d.dataDir()
	if err != nil {
		return nil, err
	}
	defer root.close()
	var dialer net.Dialer
	c, err := dialer.DialContext(ctx, "unix", root.socketAddress())
	return c, socketError("connect to", root, err)
}

// socketAddress names the socket by the open directory: an address has at most 107 bytes.
func (f *folder) socketAddress() string {
	return fmt.Sprintf("/proc/self/fd/%d/%s", f.fd(), socketFile)
}

// socketError rewords an error of package net, which has the socketAddress.
func socketError(op string, root *folder, err error) error {
	if errno, is := errors.AsType[unix.Errno](err); is {
		err = errno
	}
	return failure(op, root.in(socketFile), err)
}
