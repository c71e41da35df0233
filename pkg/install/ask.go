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
	"time"

	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"github.com/ip-masq/ip-masq-cni/pkg/policy"
)

// ask runs a plugin where it lies, as a runtime does that wants its versions, and
// then without a command, where it tells about itself. It returns what version
// the program is of, and fails unless it is ours and speaks what we speak.
func ask(ctx context.Context, path string) (string, error) {
	answer, err := call(ctx, path, "CNI_COMMAND=VERSION")
	if err != nil {
		return "", err
	}
	info, err := (&version.PluginDecoder{}).Decode(answer)
	if err != nil {
		return "", fmt.Errorf("run %s for its VERSION: it answered %s, which no CNI plugin says", shown(path), policy.Quote(string(answer)))
	}
	for _, v := range version.All.SupportedVersions() {
		if !slices.Contains(info.SupportedVersions(), v) {
			return "", fmt.Errorf("run %s for its VERSION: it speaks CNI %s, and not %s, which conflists may have; take the plugin of this release",
				shown(path), policy.Quote(strings.Join(info.SupportedVersions(), ", ")), v)
		}
	}
	about, err := call(ctx, path)
	if err != nil {
		return "", err
	}
	found := regexp.MustCompile(`^ip-masq (\S{1,64}): `).FindSubmatch(about)
	if found == nil {
		return "", fmt.Errorf("run %s: it says %s, so it is another plugin; name ours with --plugin", shown(path), policy.Quote(string(about)))
	}
	return string(found[1]), nil
}

// call runs a plugin and returns what it says, on whichever output.
func call(ctx context.Context, path string, env ...string) ([]byte, error) {
	const longest, most = 20 * time.Second, 64 << 10
	ctx, cancel := context.WithTimeout(ctx, longest)
	defer cancel()
	said := &limited{left: most}
	c := exec.CommandContext(ctx, path)
	c.Env = append([]string{}, env...) // not ours
	c.Stdin = strings.NewReader(`{"cniVersion": "1.0.0"}`)
	c.Stdout, c.Stderr = said, said
	c.WaitDelay = time.Second
	err := c.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return bytes.TrimSpace(said.Bytes()), nil
	case ctx.Err() != nil:
		err = fmt.Errorf("no answer within %s", longest)
	case errors.Is(err, unix.ENOEXEC):
		err = fmt.Errorf("%w: it is no program for this node, which is %s; take the plugin for that", unix.ENOEXEC, runtime.GOARCH)
	case errors.Is(err, unix.EACCES):
		err = fmt.Errorf("%w: the directory does not let programs run; mount it without noexec, or name another with --cni-bin-dir", unix.EACCES)
	case errors.Is(err, unix.ENOENT):
		err = fmt.Errorf("%w: it needs a loader that the node does not have; take the plugin of a release, which is static", unix.ENOENT)
	case errors.As(err, &exit):
		err = fmt.Errorf("%w, saying %s", exit, policy.Quote(string(bytes.TrimSpace(said.Bytes()))))
	}
	return nil, fmt.Errorf("run %s: %w", shown(path), err)
}

// limited keeps the beginning of what is written to it.
type limited struct {
	bytes.Buffer
	left int
}

// Write implements io.Writer.
func (l *limited) Write(p []byte) (int, error) {
	kept := p[:min(len(p), l.left)]
	l.left -= len(kept)
	_, err := l.Buffer.Write(kept)
	return len(p), err
}

var _ io.Writer = (*limited)(nil)
