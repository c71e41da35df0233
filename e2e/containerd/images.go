// SPDX-License-Identifier: Apache-2.0

package containerd

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"

	"github.com/ip-masq/ip-masq-cni/deploy/image/oci"
	"github.com/ip-masq/ip-masq-cni/e2e/assert"
	"github.com/ip-masq/ip-masq-cni/e2e/topology"
)

// PodImage has the program of the directory pod, as its entry point: pods' sandboxes are made of it, and
// containers that send and answer.
const PodImage = "ip-masq.test/pod:1"

// podProgram is what PodImage is made of.
const podProgram = "github.com/ip-masq/ip-masq-cni/e2e/containerd/pod"

// image builds the image and returns it as an OCI archive.
func image(ctx context.Context, t topology.T) []byte {
	var archive bytes.Buffer
	assert.NoError(t, oci.Write(&archive, oci.Image{Name: PodImage, Arch: runtime.GOARCH, Entrypoint: []string{"/pod"},
		Layers: [][]oci.File{{{Name: "pod", Mode: 0o755, Data: PodProgram(ctx, t)}}}}))
	return archive.Bytes()
}

// PodProgram builds the program of PodImage, statically linked because the image has no libc.
func PodProgram(ctx context.Context, t topology.T) []byte {
	t.Helper()
	dir := assert.Must(os.MkdirTemp("", "ip-masq-pod-"))(t)
	defer func() { _ = os.RemoveAll(dir) }()
	path := filepath.Join(dir, "pod")
	c := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w", "-o", path, podProgram)
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	assert.Output(t, c)
	return assert.Must(os.ReadFile(path))(t)
}
