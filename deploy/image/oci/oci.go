// SPDX-License-Identifier: Apache-2.0

package oci

import (
	"archive/tar"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"slices"
	"strings"
)

// File is one entry of a layer. It belongs to root. Mode has the permissions and
// may have fs.ModeDir, fs.ModeSymlink, fs.ModeSetuid, fs.ModeSetgid and
// fs.ModeSticky; a symbolic link leads to Link. Name is relative to the image's
// root; a slash at its beginning does not matter.
type File struct {
	Name string
	Mode fs.FileMode
	Data []byte
	Link string
}

// Image is a Linux image for one architecture. Name is a whole reference,
// registry/repository:tag. Arch is as in GOARCH. The lowest layer comes first;
// directories that nothing declares are made with mode 0755.
type Image struct {
	Name, Arch           string
	Layers               [][]File
	Entrypoint, Cmd, Env []string
	WorkingDir           string
	Labels               map[string]string
}

const (
	typeIndex    = "application/vnd.oci.image.index.v1+json"
	typeManifest = "application/vnd.oci.image.manifest.v1+json"
	typeConfig   = "application/vnd.oci.image.config.v1+json"
	typeLayer    = "application/vnd.oci.image.layer.v1.tar+gzip"

	// What an image is called. Runtimes of CRI read the one of containerd, which has
	// the whole name; to other tools the tag is the reference within the layout.
	annotationName = "io.containerd.image.name"
	annotationRef  = "org.opencontainers.image.ref.name"
)

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
	Platform    *platform         `json:"platform,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

type index struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Manifests     []descriptor `json:"manifests"`
}

type manifest struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Config        descriptor   `json:"config"`
	Layers        []descriptor `json:"layers"`
}

// configuration is the image configuration of the specification (config.md).
type configuration struct {
	Created      string    `json:"created"`
	Architecture string    `json:"architecture"`
	OS           string    `json:"os"`
	Config       execution `json:"config"`
	RootFS       rootFS    `json:"rootfs"`
}

type execution struct {
	Env        []string          `json:"Env,omitempty"`
	Entrypoint []string          `json:"Entrypoint,omitempty"`
	Cmd        []string          `json:"Cmd,omitempty"`
	WorkingDir string            `json:"WorkingDir,omitempty"`
	Labels     map[string]string `json:"Labels,omitempty"`
}

type rootFS struct {
	Type    string   `json:"type"`
	DiffIDs []string `json:"diff_ids"`
}

// epoch is when everything was made, so that bytes do not depend on it.
const epoch = "1970-01-01T00:00:00Z"

// Write writes an archive that holds the images. Those of one name, which must be
// of different architectures, become one image index.
func Write(w io.Writer, images ...Image) error {
	if len(images) == 0 {
		return errors.New("write image archive: no image given")
	}
	blobs := blobs{}
	var names []string
	byName := map[string][]descriptor{}
	for _, image := range images {
		if err := image.check(); err != nil {
			return fmt.Errorf("write image archive: %w", err)
		}
		of, err := blobs.addImage(image)
		if err != nil {
			return fmt.Errorf("write image %s for %s: %w", image.Name, image.Arch, err)
		}
		known := byName[image.Name]
		if slices.ContainsFunc(known, func(d descriptor) bool { return *d.Platform == *of.Platform }) {
			return fmt.Errorf("write image %s: given twice for %s", image.Name, image.Arch)
		}
		if known == nil {
			names = append(names, image.Name)
		}
		byName[image.Name] = append(known, of)
	}
	top := index{SchemaVersion: 2, MediaType: typeIndex}
	for _, name := range names {
		of := byName[name]
		slices.SortFunc(of, func(a, b descriptor) int { return cmp.Compare(a.Platform.Architecture, b.Platform.Architecture) })
		one := of[0]
		if len(of) > 1 {
			var err error
			one, err = blobs.addJSON(typeIndex, index{SchemaVersion: 2, MediaType: typeIndex, Manifests: of})
			if err != nil {
				return fmt.Errorf("write image %s: %w", name, err)
			}
		}
		one.Annotations = map[string]string{annotationName: name, annotationRef: tag(name)}
		top.Manifests = append(top.Manifests, one)
	}
	return blobs.write(w, top)
}

// check finds what would make an image that cannot be named or chosen.
func (i Image) check() error {
	switch {
	case tag(i.Name) == "":
		return fmt.Errorf("image name %q has no tag; write it as registry/repository:tag", i.Name)
	case i.Arch == "":
		return fmt.Errorf("image %s has no architecture", i.Name)
	case len(i.Layers) == 0:
		return fmt.Errorf("image %s has no layers", i.Name)
	}
	return nil
}

// tag is what stands behind the last colon, unless that is the one of a port.
func tag(name string) string {
	at := strings.LastIndexByte(name, ':')
	if at < 1 || strings.Contains(name[at:], "/") {
		return ""
	}
	return name[at+1:]
}

// addImage adds the blobs of one image and returns what describes its manifest.
func (b blobs) addImage(image Image) (descriptor, error) {
	c := configuration{
		Created: epoch, Architecture: image.Arch, OS: "linux",
		Config: execution{
			Env: image.Env, Entrypoint: image.Entrypoint, Cmd: image.Cmd,
			WorkingDir: image.WorkingDir, Labels: image.Labels,
		},
		RootFS: rootFS{Type: "layers"},
	}
	m := manifest{SchemaVersion: 2, MediaType: typeManifest}
	seen := tree{}
	for i, files := range image.Layers {
		layer, err := seen.layer(files)
		if err != nil {
			return descriptor{}, fmt.Errorf("layer %d: %w", i, err)
		}
		c.RootFS.DiffIDs = append(c.RootFS.DiffIDs, digest(layer))
		packed, err := compress(layer)
		if err != nil {
			return descriptor{}, fmt.Errorf("layer %d: %w", i, err)
		}
		m.Layers = append(m.Layers, b.add(typeLayer, packed))
	}
	var err error
	if m.Config, err = b.addJSON(typeConfig, c); err != nil {
		return descriptor{}, err
	}
	d, err := b.addJSON(typeManifest, m)
	d.Platform = &platform{Architecture: image.Arch, OS: "linux"}
	return d, err
}

// write writes the layout as a tar: its marker, the index, the blobs.
func (b blobs) write(w io.Writer, top index) error {
	archive := tar.NewWriter(w)
	document, err := encode(top)
	if err != nil {
		return fmt.Errorf("write image archive: %w", err)
	}
	entries := []File{
		{Name: "oci-layout", Mode: 0o644, Data: []byte(`{"imageLayoutVersion":"1.0.0"}`)},
		{Name: "index.json", Mode: 0o644, Data: document},
		{Name: "blobs", Mode: fs.ModeDir | 0o755},
		{Name: "blobs/sha256", Mode: fs.ModeDir | 0o755},
	}
	for _, hash := range slices.Sorted(maps.Keys(b)) {
		entries = append(entries, File{Name: "blobs/sha256/" + hash, Mode: 0o644, Data: b[hash]})
	}
	for _, e := range entries {
		if err := put(archive, e); err != nil {
			return fmt.Errorf("write image archive: %w", err)
		}
	}
	if err := archive.Close(); err != nil {
		return fmt.Errorf("write image archive: %w", err)
	}
	return nil
}
