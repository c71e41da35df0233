// SPDX-License-Identifier: Apache-2.0

package containerd

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"

	"github.com/ip-masq/ip-masq-cni/deploy/image/oci"
)

// PodImage has the program of the directory pod, as its entry point: pods' sandboxes are made of it, and
// containers that send and answer.
const PodImage = "ip-masq.test/pod:1"

// podProgram is what PodImage is made of.
const podProgram = "github.com/ip-masq/ip-masq-cni/e2e/containerd/pod"

// Image builds the image and returns it as an OCI archive.
func Image(ctx context.Context) ([]byte, error) {
	program, err := PodProgram(ctx)
	if err != nil {
		return nil, err
	}
	var archive bytes.Buffer
	err = oci.Write(&archive, oci.Image{Name: PodImage, Arch: runtime.GOARCH, Entrypoint: []string{"/pod"},
		Layers: [][]oci.File{{{Name: "pod", Mode: 0o755, Data: program}}}})
	if err != nil {
		return nil, fmt.Errorf("write image: %w", err)
	}
	return archive.Bytes(), nil
}

// PodProgram builds the program of PodImage, statically linked because the image has no libc.
func PodProgram(ctx context.Context) ([]byte, error) {
	dir, err := os.MkdirTemp("", "ip-masq-pod-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	path := filepath.Join(dir, "pod")
	c := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", path, podProgram)
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if output, err := c.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build %s: %w: %s", podProgram, err, output)
	}
	return os.ReadFile(path)
}
