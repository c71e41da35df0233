// SPDX-License-Identifier: Apache-2.0

package install

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// asked is a program that is asked what it is.
type asked struct {
	path, name string
	patience   time.Duration // for each answer
}

// ask runs a plugin where it lies, as a runtime does that wants its versions, and
// then without a command, where it tells about itself. It returns what version
// the program is of, and fails unless it is ours and speaks what we speak. The
// name is for messages.
func ask(ctx context.Context, path, name string) (string, error) {
	const longest = 20 * time.Second
	a := asked{path: path, name: name, patience: longest}
	return a.version(ctx)
}

// Version returns what version an installed plugin says that it is of.
func Version(ctx context.Context, path string) (string, error) {
	const longest = 2 * time.Second
	return asked{path, policy.Printable(path), longest}.about(ctx)
}

func (a asked) version(ctx context.Context) (string, error) {
	answer, err := a.call(ctx, "CNI_COMMAND=VERSION")
	if err != nil {
		return "", err
	}
	info, err := (&version.PluginDecoder{}).Decode(answer)
	if err != nil {
		return "", fmt.Errorf("run %s for its VERSION: it answered %s, which no CNI plugin says; name ours with --plugin", a.name, policy.Quote(string(answer)))
	}
	for _, v := range version.All.SupportedVersions() {
		if !slices.Contains(info.SupportedVersions(), v) {
			return "", fmt.Errorf("run %s for its VERSION: it speaks CNI %s, and not %s, which conflists may have; take the plugin of this release",
				a.name, policy.Quote(strings.Join(info.SupportedVersions(), ", ")), v)
		}
	}
	return a.about(ctx)
}

func (a asked) about(ctx context.Context) (string, error) {
	about, err := a.call(ctx)
	if err != nil {
		return "", err
	}
	found := regexp.MustCompile(`^ip-masq (\S{1,64}): `).FindSubmatch(about)
	if found == nil {
		return "", fmt.Errorf("run %s: it says %s, so it is another plugin; name ours with --plugin", a.name, policy.Quote(string(about)))
	}
	return string(found[1]), nil
}

// call runs a plugin and returns what it says, on whichever output. What it began
// ends with it.
func (a asked) call(ctx context.Context, env ...string) ([]byte, error) {
	const notOurs = "so it is not our plugin; name that with --plugin"
	limit, cancel := context.WithTimeout(ctx, a.patience)
	defer cancel()
	said := &limited{left: mostSaid}
	c := exec.CommandContext(limit, a.path)
	c.Env = append([]string{}, env...) // not ours
	c.Stdin = strings.NewReader(`{"cniVersion": "1.0.0"}`)
	c.Stdout, c.Stderr = said, said
	c.WaitDelay = time.Second
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.Cancel = func() error { return unix.Kill(-c.Process.Pid, unix.SIGKILL) }
	err := c.Run()
	if err != nil && c.Process != nil {
		_ = c.Cancel() // what outlived it; mostly nothing did
	}
	var exit *exec.ExitError
	switch {
	case err == nil:
		return bytes.TrimSpace(said.text.Bytes()), nil
	case ctx.Err() != nil:
		return nil, ErrStopped
	case errors.Is(err, exec.ErrWaitDelay):
		err = fmt.Errorf("it left something running, %s", notOurs)
	case limit.Err() != nil:
		err = fmt.Errorf("no answer within %s, %s", a.patience, notOurs)
	case said.left < 0:
		err = fmt.Errorf("it says more than %d KiB, %s", mostSaid>>10, notOurs)
	case errors.Is(err, unix.ENOEXEC):
		err = fmt.Errorf("%w: it is no program for this node, which is %s; take the plugin for that", unix.ENOEXEC, runtime.GOARCH)
	case errors.Is(err, unix.EACCES):
		err = fmt.Errorf("%w: the directory does not let programs run; mount it without noexec, or name another with --cni-bin-dir", unix.EACCES)
	case errors.Is(err, unix.ENOENT):
		err = fmt.Errorf("%w: it needs a loader that the node does not have; take the plugin of a release, which is static", unix.ENOENT)
	case errors.As(err, &exit):
		err = fmt.Errorf("%w, saying %s; name our plugin with --plugin", exit, policy.Quote(string(bytes.TrimSpace(said.text.Bytes()))))
	}
	return nil, fmt.Errorf("run %s: %w", a.name, err)
}

// mostSaid is how much a plugin may say, in bytes.
const mostSaid = 64 << 10

// limited takes what is written to it as long as there is room. The error that it
// gives then ends the writer, by a closed pipe.
type limited struct {
	text bytes.Buffer
	left int // below 0 once it was too little
}

// Write implements io.Writer.
func (l *limited) Write(p []byte) (int, error) {
	if l.left -= len(p); l.left < 0 {
		return 0, io.ErrShortWrite
	}
	return l.text.Write(p)
}
